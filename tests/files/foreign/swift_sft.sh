NPROC_PER_NODE=2 \
CUDA_VISIBLE_DEVICES=0,1 \
swift sft \
    --model Qwen/Qwen2.5-7B-Instruct \
    --tuner_type full \
    --dataset AI-ModelScope/alpaca-gpt4-data-en#2000 \
    --torch_dtype bfloat16 \
    --num_train_epochs 1 \
    --per_device_train_batch_size 1 \
    --learning_rate 1e-5 \
    --packing true \
    --gradient_accumulation_steps 8 \
    --eval_steps 50 --save_steps 50 --save_total_limit 2 \
    --max_length 4096 --output_dir output --warmup_ratio 0.05 \
    --attn_impl flash_attn
