#!/usr/bin/env bash
# Run this script in slime's folder (slime is not on PyPI), in an environment that also has Outrider. Append slime's own
# arguments for the model, the engines and the optimiser: examples/slime/train.sh --hf-checkpoint ...
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

exec python train.py \
    --rollout-function-path outrider.trainers.slime.generate_rollout \
    --custom-reward-post-process-path outrider.trainers.slime.post_process_rewards \
    --custom-config-path "$here/settings.yaml" \
    --prompt-data "$here/rows.jsonl" --input-key prompt --label-key label --rollout-shuffle \
    --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std \
    --rollout-batch-size 4 --n-samples-per-prompt 8 --over-sampling-batch-size 8 --global-batch-size 32 \
    --advantage-estimator grpo --use-tis \
    "$@"
