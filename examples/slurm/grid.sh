#!/bin/bash
# A grid as arrays of Slurm jobs, one for each run that is not in the cells yet: bash grid.sh, on a login node.
# Ctrl-C stops the jobs; the same command goes on with what is missing.

gossamer compare job.toml --grid method.outer_lr=0.5,0.7,0.9 --grid plan.steps=16,32 --seeds 3 \
    --out runs/grid --cells cells --jobs 32 \
    --engine slurm --engine-option partition=cpu --engine-option timeout_min=240 --engine-option mem_gb=8
