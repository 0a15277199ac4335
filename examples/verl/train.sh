#!/usr/bin/env bash
# GRPO with verl 0.9.1 on one node of 8 GPUs: agents in sandboxes of an Outrider service, generation by verl's own servers.
# First start the service where the trainer's nodes can reach it; verl's servers attach themselves as its engine:
#   OUTRIDER_TOKEN=... outrider serve --host 0.0.0.0 --insecure --tokenizer "$MODEL" --renderer qwen3
set -euo pipefail
: "${MODEL:?the folder of the model}" "${DATA:?the folder that make_data.py wrote}"
: "${OUTRIDER_URL:?the address of the service}" "${OUTRIDER_TOKEN:?its token}"

rollout=actor_rollout_ref.rollout
worker_env=ray_kwargs.ray_init.runtime_env.env_vars

for split in train val; do
    [ -e "$DATA/$split.parquet" ] || { echo "no $DATA/$split.parquet: write it with make_data.py ... --val N" >&2; exit 2; }
done

exec python -m verl.trainer.main_ppo \
    "data.train_files=[$(readlink -f "$DATA/train.parquet")]" "data.val_files=[$(readlink -f "$DATA/val.parquet")]" \
    data.train_batch_size=32 "actor_rollout_ref.model.path=$MODEL" \
    algorithm.adv_estimator=outrider_rollout actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \
    algorithm.filter_groups.enable=True algorithm.filter_groups.metric=score \
    $rollout.name=vllm $rollout.n=8 $rollout.prompt_length=4096 $rollout.response_length=16384 \
    $rollout.calculate_log_probs=True $rollout.temperature=1.0 \
    +$rollout.agent.agent_loop_manager_class=outrider.trainers.verl.OutriderAgentLoopManager \
    "+$rollout.custom.outrider.relay=trainer" \
    "+$rollout.custom.outrider.task.harness.preset=mini-swe-agent" \
    "+$worker_env.OUTRIDER_URL=$OUTRIDER_URL" "+$worker_env.OUTRIDER_TOKEN=$OUTRIDER_TOKEN" \
    "$@"
