CUDA_VISIBLE_DEVICES=0,1 \
NPROC_PER_NODE=2 \
swift rlhf \
    --rlhf_type kto \
    --model Qwen/Qwen2.5-7B-Instruct \
    --train_type full \
    --dataset 'org/kto-pairs#10000' \
    --split_dataset_ratio 0.01 \
    --num_train_epochs 1 \
    --per_device_train_batch_size 1 \
    --learning_rate 1e-6 \
    --undesirable_weight 1.2 \
    --gradient_accumulation_steps 8 \
    --eval_steps 100 --save_steps 100 --save_total_limit 2 \
    --max_length 2048 --output_dir output --warmup_ratio 0.05 \
    --deepspeed zero2
