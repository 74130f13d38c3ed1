#!/bin/bash
# One run on two nodes of four ranks each, without submitit. Whatever stands behind the file's name goes to rlexp; what
# the cluster needs goes to sbatch, or into the lines below:
#
#   sbatch launchers/srun.sh parallel=ring8 launch.device=cpu
#   sbatch --partition=gpu --gpus-per-node=8 --ntasks-per-node=8 launchers/srun.sh parallel=ring16 model=hf model.path=DIR
#
# The run is in runs/slurm-JOB; to go on with another, say RLEXP_RUN_DIR=FOLDER before sbatch. When its time is nearly up,
# or it is pre-empted or requeued, it saves and goes on there.
#SBATCH --job-name=rlexp
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=2
#SBATCH --time=4:00:00
#SBATCH --signal=USR2@150
#SBATCH --requeue
#SBATCH --open-mode=append

export RLEXP_RUN_DIR=${RLEXP_RUN_DIR:-$SLURM_SUBMIT_DIR/runs/slurm-$SLURM_JOB_ID}
case " $*" in *" hydra.run.dir="*) echo "hydra.run.dir: say RLEXP_RUN_DIR=FOLDER before sbatch" >&2; exit 1 ;; esac
logs=$RLEXP_RUN_DIR/logs
mkdir -p "$logs"
echo "rlexp: start ${SLURM_RESTART_COUNT:-0} of job $SLURM_JOB_ID on $SLURM_JOB_NODELIST" | tee -a "$logs/srun.log"

# A rank that fails takes the others along, and so does one that leaves 15 s before them.
export SLURM_KILL_BAD_EXIT=1 SLURM_WAIT=15 SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
: "${SLURM_JOB_END_TIME:=$(date -d "$(squeue -h -j "$SLURM_JOB_ID" -o %e)" +%s 2>/dev/null)}"
export SLURM_JOB_END_TIME

srun --unbuffered --output="$logs/rank%t.log" --error="$logs/rank%t.log" \
    "${PYTHON:-python}" -m rlexp hydra.run.dir="$RLEXP_RUN_DIR" "$@" 2>>"$logs/srun.log"

answer=$("${PYTHON:-python}" -m rlexp.launch.slurm.ended $? --log="$logs/rank%t.log" --srun="$logs/srun.log")
code=$?
if [ "$answer" = requeue ]; then
    until scontrol requeue "$SLURM_JOB_ID" || [ $((tries += 1)) -ge 10 ]; do sleep 15; done
fi
exit $code
