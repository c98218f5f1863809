#!/bin/bash
# Two machines with a worker each, by Slurm: sbatch slurm.sh
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --time=04:00:00

source .venv/bin/activate  # in a folder that both machines see

# A lost worker ends the others. The loop starts all of them again; resume.py goes on from its backup.
for run in $(seq 4); do
    srun --kill-on-bad-exit --cpus-per-task="$SLURM_CPUS_PER_TASK" \
        gradcomp run --output chief resume.py && exit
done
exit 1
