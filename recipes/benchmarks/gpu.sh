#!/usr/bin/env bash
# What is to be measured on a GPU, in under eight minutes on a fast one; made again, it continues where it was.
#
#     bash recipes/benchmarks/gpu.sh runs/gpu
#     TOY=1 bash recipes/benchmarks/gpu.sh runs/toy     # without a GPU: tiny sizes, Triton's interpreter
#
# Each part leaves a file or a folder in the output folder when it has ended: the tests of the kernels, compiled;
# guidance (plain, Triton, blocks, maps); observers while a decoder of a billion parameters reads long texts; and the
# tests of whole models on a GPU. A part that fails is reported, and the others run. TOY leaves out the tests.
set -uo pipefail
cd "$(dirname "$0")/../.."

output=${1:?usage: bash recipes/benchmarks/gpu.sh FOLDER}
mkdir -p "$output"
sizes=(--device cuda --dtype bfloat16 --num_hidden_layers 12 --lengths 512 2048 8192 --tokens 8192)
prefill=(--device cuda --dtype bfloat16 --lengths 8192 32768 --rounds 5)
systems=(plain triton blocks naive)
if [ -n "${TOY:-}" ]; then
    export TRITON_INTERPRET=1
    tiny=(--device cpu --num_hidden_layers 1 --hidden_size 64 --num_attention_heads 4 --lengths 24 --rounds 1)
    sizes=("${tiny[@]}" --tokens 24)
    prefill=("${tiny[@]}" --num_key_value_heads 2)
    systems=(plain triton)
fi

failed=()
part() {
    local name=$1
    shift
    if [ -e "$output/$name.done" ]; then
        echo "$name: done before"
        return
    fi
    rm -rf "${output:?}/$name"
    echo "$name: $*"
    if "$@" > "$output/$name.log" 2>&1; then
        touch "$output/$name.done"
        tail -n 8 "$output/$name.log"
    else
        failed+=("$name")
        tail -n 20 "$output/$name.log"
    fi
}

[ -n "${TOY:-}" ] || part kernel_tests python -m pytest -q tests/models/test_guidance_kernel.py tests/models/test_distillation_kernel.py
part guidance python recipes/benchmarks/guidance.py "${sizes[@]}" --systems "${systems[@]}" --output_dir "$output/guidance"
part prefill python recipes/benchmarks/prefill.py "${prefill[@]}" --output_dir "$output/prefill"
[ -n "${TOY:-}" ] || part model_tests python -m pytest -q tests/models/test_on_gpu.py

if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}; see the logs in $output"
    exit 1
fi
