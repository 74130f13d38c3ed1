#!/bin/bash
# One run on two nodes, started by a torchrun on each, for sites that want torchrun. srun.sh is simpler.
#
#   sbatch launchers/torchrun.sh parallel=ring8 launch.device=cpu
#   RANKS=8 sbatch --partition=gpu --gpus-per-node=8 launchers/torchrun.sh parallel.ring_size=16 model=llama3_1_8b
#
# The run is in runs/slurm-JOB. To continue another run, set RLEXP_RUN_DIR=FOLDER before sbatch. When the run's time is
# nearly up, or it is pre-empted or requeued, it saves, and later continues in the same folder.
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

# When a rank fails, the others end with it; the ranks learn when the job's time is up; `rlexp_run_dir` is the run's
# folder as an argument; and `rlexp_leave` is defined.
preamble=$("${PYTHON:-python}" -m rlexp.launch.slurm.preamble) || exit 1
eval "$preamble"

# The torchruns meet on the first node, at a port below those that a system hands out by itself. Each start of a job
# has its own id, so that jobs that share a port do not take each other's ranks.
meeting=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):$((20000 + SLURM_JOB_ID % 12000))
# Slurm signals torchrun too, which would die of it. So it ignores the signal; its ranks obey it, and torchrun follows.
begin='echo "rlexp: start ${SLURM_RESTART_COUNT:-0} of job $SLURM_JOB_ID" >&2; trap "" USR1 USR2; exec "$@"'
srun --unbuffered --output="$logs/node%t.log" --error="$logs/node%t.log" bash -c "$begin" torchrun \
    "${PYTHON:-python}" -m torch.distributed.run --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="${RANKS:-4}" \
    --rdzv-backend=c10d --rdzv-endpoint="$meeting" --rdzv-id="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}" \
    -m rlexp "$rlexp_run_dir" "$@" 2>>"$logs/srun.log"

answer=$("${PYTHON:-python}" -m rlexp.launch.slurm.ended $? --log="$logs/node%t.log" --srun="$logs/srun.log" \
    --torchrun)
rlexp_leave $? "$answer"  # exits with that code, after queueing the job again where the answer says so
