#!/bin/bash
# One run on two nodes with four ranks each, without submitit. Arguments after the file's name go to rlexp. What the
# cluster needs goes to sbatch, or into the lines below:
#
#   sbatch launchers/srun.sh parallel=ring8 launch.device=cpu
#   sbatch --partition=gpu --gpus-per-node=8 --ntasks-per-node=8 launchers/srun.sh parallel.ring_size=16 model=llama3_1_8b
#
# The run is in runs/slurm-JOB. To continue another run, set RLEXP_RUN_DIR=FOLDER before sbatch. When the run's time is
# nearly up, or it is pre-empted or requeued, it saves, and later continues in the same folder.
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

# When a rank fails, the others end with it; the ranks learn when the job's time is up; `rlexp_run_dir` is the run's
# folder as an argument; and `rlexp_leave` is defined.
preamble=$("${PYTHON:-python}" -m rlexp.launch.slurm.preamble) || exit 1
eval "$preamble"

srun --unbuffered --output="$logs/rank%t.log" --error="$logs/rank%t.log" \
    "${PYTHON:-python}" -m rlexp "$rlexp_run_dir" "$@" 2>>"$logs/srun.log"

answer=$("${PYTHON:-python}" -m rlexp.launch.slurm.ended $? --log="$logs/rank%t.log" --srun="$logs/srun.log")
rlexp_leave $? "$answer"  # exits with that code, after queueing the job again where the answer says so
