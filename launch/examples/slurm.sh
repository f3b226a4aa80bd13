#!/bin/bash
#SBATCH --job-name=jaxlamina
#SBATCH --ntasks=3
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-task=1
#SBATCH --time=01:00:00
#
# One rank a task: as many tasks as the DOP has ranks. Submit from the folder that holds the cluster file:
#   JAXLAMINA_CONFIG=configs/clusters/hosts-xla.toml sbatch launch/examples/slurm.sh generate "…"
set -euo pipefail

config="${JAXLAMINA_CONFIG:-configs/clusters/hosts-xla.toml}"
# Two ports follow the job's number, so that jobs may share a node. They stay below 32768, from where on the kernel
# gives ports to whoever asks for any.
port=$((20000 + 2 * (SLURM_JOB_ID % 6000)))
head="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"

# A word by which rank 0 knows its own ranks; srun hands the environment on.
export JAXLAMINA_JOB="$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')"

# A rank that fails ends the job. --mpi=pmix serves transport = "mpi" and does no harm to "xla".
srun --mpi=pmix --kill-on-bad-exit=1 --wait=30 --label \
  python -m launch --config "$config" \
  --set "control=\"$head:$port\"" --set "coordinator=\"$head:$((port + 1))\"" \
  -- "$@"
