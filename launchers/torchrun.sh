#!/bin/bash
# One run on two nodes, started by torchrun on each: for sites that want it so. Else srun.sh, which has fewer parts.
#
#   sbatch launchers/torchrun.sh parallel=ring8 launch.device=cpu
#   RANKS=8 sbatch --partition=gpu --gpus-per-node=8 launchers/torchrun.sh parallel=ring16 model=hf model.path=DIR
#
# The run is in runs/slurm-JOB; to go on with another, say RLEXP_RUN_DIR=FOLDER before sbatch. When its time is nearly up,
# or it is pre-empted or requeued, it saves and goes on there.
#SBATCH --job-name=rlexp
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=4:00:00
#SBATCH --signal=USR2@150
#SBATCH --requeue
#SBATCH --open-mode=append

export RLEXP_RUN_DIR=${RLEXP_RUN_DIR:-$SLURM_SUBMIT_DIR/runs/slurm-$SLURM_JOB_ID}
case " $*" in *" hydra.run.dir="*) echo "hydra.run.dir: say RLEXP_RUN_DIR=FOLDER before sbatch" >&2; exit 1 ;; esac
logs=$RLEXP_RUN_DIR/logs
mkdir -p "$logs"
echo "rlexp: start ${SLURM_RESTART_COUNT:-0} of job $SLURM_JOB_ID on $SLURM_JOB_NODELIST" | tee -a "$logs/srun.log"

export SLURM_KILL_BAD_EXIT=1 SLURM_WAIT=15 SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
: "${SLURM_JOB_END_TIME:=$(date -d "$(squeue -h -j "$SLURM_JOB_ID" -o %e)" +%s 2>/dev/null)}"
export SLURM_JOB_END_TIME

# torchrun's agents meet on the first node, below the ports that a system hands out by itself; each start of a job has
# an id of its own, so that jobs that share a port do not take each other's ranks.
meeting=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):$((20000 + SLURM_JOB_ID % 12000))
# Slurm signals torchrun too, which would die of it: its ranks hear, and it goes when they have gone.
begin='echo "rlexp: start ${SLURM_RESTART_COUNT:-0} of job $SLURM_JOB_ID" >&2; trap "" USR1 USR2; exec "$@"'
srun --unbuffered --output="$logs/node%t.log" --error="$logs/node%t.log" bash -c "$begin" torchrun \
    "${PYTHON:-python}" -m torch.distributed.run --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="${RANKS:-4}" \
    --rdzv-backend=c10d --rdzv-endpoint="$meeting" --rdzv-id="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}" \
    -m rlexp hydra.run.dir="$RLEXP_RUN_DIR" "$@" 2>>"$logs/srun.log"

answer=$("${PYTHON:-python}" -m rlexp.launch.slurm.ended $? --log="$logs/node%t.log" --srun="$logs/srun.log" \
    --torchrun)
code=$?
if [ "$answer" = requeue ]; then
    until scontrol requeue "$SLURM_JOB_ID" || [ $((tries += 1)) -ge 10 ]; do sleep 15; done
fi
exit $code
