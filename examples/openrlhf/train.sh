#!/usr/bin/env bash
# Runs GRPO with OpenRLHF 0.11 on one node of 8 GPUs. The agents run in sandboxes of an Outrider service.
# The service must reach an engine that serves the policy and gets OpenRLHF's new weights; see docs/trainers/openrlhf.md.
set -euo pipefail
: "${MODEL:?the folder of the model}"
here=$(cd "$(dirname "$0")" && pwd)
export OUTRIDER_OPENRLHF="@$here/settings.toml"

exec python -m openrlhf.cli.train_ppo_ray \
    --train.agent_func_path "$here/agent.py" \
    --actor.model_name_or_path "$MODEL" \
    --data.prompt_dataset "$here/rows.jsonl" --data.input_key prompt --data.label_key label \
    --rollout.batch_size 4 --rollout.n_samples_per_prompt 8 \
    --algo.advantage.estimator group_norm --actor.loss_agg_mode seq-mean-token-mean \
    --algo.dynamic_filtering_enable --algo.dynamic_filtering_range 0 1 \
    --algo.advantage.is_correction_level token \
    "$@"
