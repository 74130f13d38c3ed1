NPROC_PER_NODE=4 \
CUDA_VISIBLE_DEVICES=0,1,2,3 \
swift rlhf \
    --rlhf_type dpo \
    --model Qwen/Qwen2.5-7B-Instruct \
    --train_type full \
    --dataset hjh0119/shareAI-Llama3-DPO-zh-en-emoji \
    --torch_dtype bfloat16 \
    --per_device_train_batch_size 4 \
    --learning_rate 1e-5 \
    --gradient_accumulation_steps 1 \
    --eval_steps 100 --save_steps 100 --save_total_limit 2 \
    --max_length 8192 --output_dir output --warmup_ratio 0.05 \
    --deepspeed zero3 --attn_impl flash_attn --rpo_alpha 0.1 --sequence_parallel_size 2
