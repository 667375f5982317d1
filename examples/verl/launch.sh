#!/usr/bin/env bash
# Starts all that runs on this node; README.md says what. NODES are the names of all nodes, the first one's first.
#
#   NODES="node1" examples/verl/launch.sh one_node           on node1
#
#   NODES="node1 node2" examples/verl/launch.sh two_nodes    on node1
#   NODES="node1 node2" examples/verl/launch.sh join         on node2
#
# What follows one_node or two_nodes is for verl: trainer.total_epochs=2
set -euo pipefail
config=$1
shift
read -ra nodes <<<"$NODES"
first=${nodes[0]}
world_model=Qwen/Qwen3-0.6B
# The command of an environment with obsspec[training], which needs newer transformers than verl does.
cotraining=${OBSSPEC_COTRAINING:-obsspec}

# Ray's workers have these from here: on every node they are set before Ray starts.
OBSSPEC_EXAMPLE=$(cd "$(dirname "$0")" && pwd)
OBSSPEC_RUN=${OBSSPEC_RUN:-$PWD/runs/verl}
OBSSPEC_WORLD_MODELS=$(printf 'http://%s:8001,' "${nodes[@]}")
OBSSPEC_WORLD_MODELS=${OBSSPEC_WORLD_MODELS%,}
OBSSPEC_TRANSITIONS=http://$first:8100
export OBSSPEC_EXAMPLE OBSSPEC_RUN OBSSPEC_WORLD_MODELS OBSSPEC_TRANSITIONS
# Whoever reaches Ray's port can run anything. The token is in ~/.ray, on all nodes the same.
export RAY_AUTH_MODE=token
mkdir -p "$OBSSPEC_RUN"

# However this ends, what it started ends too.
trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT
trap exit INT TERM

# Nobody waits for the world model's servers: there are no drafts until they are up. Half of the GPU is for training.
CUDA_VISIBLE_DEVICES=7 VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve $world_model --port 8001 --max-model-len 4096 \
    --scheduling-policy priority --enable-lora --max-loras 2 --max-lora-rank 16 --gpu-memory-utilization 0.5 &

export CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6
if [[ $config == join ]]; then
    until ray health-check --address "$first:6379" 2>/dev/null; do sleep 2; done
    ray start --address "$first:6379" --num-gpus 7 --block &
    wait $!
    exit
fi

CUDA_VISIBLE_DEVICES=7 "$cotraining" world-model serve "$OBSSPEC_RUN/transitions.sqlite" \
    --output "$OBSSPEC_RUN/world-model" --world-model $world_model --listen "$first:8100" \
    --vllm "$OBSSPEC_WORLD_MODELS" --precision bfloat16 &

ray get-auth-token --generate >/dev/null
ray start --head --port 6379 --num-gpus 7 --block &
gpus=$((7 * ${#nodes[@]}))
until ray status 2>/dev/null | grep --quiet "/$gpus.0 GPU"; do sleep 2; done
RAY_ADDRESS=auto python -m verl.trainer.main_ppo --config-path "$OBSSPEC_EXAMPLE" --config-name "$config" "$@" &
wait $!
