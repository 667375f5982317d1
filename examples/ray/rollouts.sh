#!/usr/bin/env bash
# Rollouts of an 8B policy on a Ray cluster: models on the GPUs of this machine, sandboxes on the cores of all machines.
# On each of the others, meanwhile: RAY_AUTH_MODE=token ray start --address HOST:6379 --block
# The same command with --resume goes on with a run that was interrupted.
set -euo pipefail
host=$(hostname)

# However this ends, what it started ends too.
trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT
trap exit INT TERM

serve() { # GPUs, port, model, and vLLM's own flags
    CUDA_VISIBLE_DEVICES=$1 vllm serve "$3" --port "$2" --scheduling-policy priority "${@:4}" &
}
serve 0,1,2,3 8000 Qwen/Qwen3-8B --tensor-parallel-size 4 --max-num-seqs 512 --max-model-len 16384 \
    --logprobs-mode processed_logprobs
# Your own world model, as `obsspec world-model train --full` makes it.
serve 4 8001 "$WORLD_MODEL" --max-model-len 4096
serve 5 8002 "$WORLD_MODEL" --max-model-len 4096

# Whoever reaches Ray's port can run anything. The token is in ~/.ray, on all machines the same.
export RAY_AUTH_MODE=token
ray get-auth-token --generate >/dev/null
ray start --head --port 6379 --block &
for port in 8000 8001 8002; do
    until curl --fail --silent "http://$host:$port/health"; do sleep 2; done
done
until ray health-check 2>/dev/null; do sleep 2; done

# 8 actors, each with 64 rollouts at once: as many as the policy's server takes.
obsspec rollout --ray auto --actors 8 --concurrency 64 --seats 512 --tasks generated:all/easy,medium/0-99 --samples 4 \
    --policy "http://$host:8000" --max-turns 32 --max-tokens 1024 --max-context 16384 \
    --predictor rules,memory,language_model,timeouts --world-model "http://$host:8001,http://$host:8002" \
    --output runs/cluster "$@" &
wait $!
