#!/usr/bin/env bash
# A recipe on several machines in a job of Slurm: one launcher a machine, one process a GPU. Submit it in the checkout:
#
#     sbatch --nodes 2 --gpus-per-node 4 recipes/configs/accelerate/slurm.sh recipes/pretrain_ag.py --output_dir SHARED
#
# A job that Slurm requeues continues its run. ACCELERATE_CONFIG names another configuration of this folder, such as
# fsdp2; PROCESSES_PER_MACHINE replaces the number of GPUs. docs/guides/scale.md says what was tried.
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

mapfile -t machines < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
processes=${PROCESSES_PER_MACHINE:-${SLURM_GPUS_ON_NODE:?no GPUs; pass --gpus-per-node to sbatch}}
export LAUNCH="accelerate launch
    --config_file recipes/configs/accelerate/${ACCELERATE_CONFIG:-several_machines}.yaml
    --num_machines $SLURM_NNODES --num_processes $((SLURM_NNODES * processes))
    --main_process_ip ${machines[0]} --main_process_port ${MAIN_PROCESS_PORT:-29500}"
if ((${SLURM_RESTART_COUNT:-0} > 0)); then
    set -- "$@" --resume true
fi
# Each task reads its own SLURM_NODEID.
srun --kill-on-bad-exit=1 bash -c 'exec $LAUNCH --machine_rank "$SLURM_NODEID" "$@"' launch "$@"
