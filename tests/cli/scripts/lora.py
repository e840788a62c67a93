"""LoRA with peft on a small Llama: most parameters frozen, a plain loop, gradient checkpointing."""

import argparse

import torch
from peft import LoraConfig, get_peft_model
from torch.optim import AdamW
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

parser = argparse.ArgumentParser()
parser.add_argument("--r", type=int, default=4)
parser.add_argument("--steps", type=int, default=4)
args = parser.parse_args()
torch.manual_seed(2)
config = LlamaConfig(
    vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip
device = "cuda" if torch.cuda.is_available() else "cpu"
model = LlamaForCausalLM(config)
model.gradient_checkpointing_enable()
model.enable_input_require_grads()
model = get_peft_model(
    model, LoraConfig(r=args.r, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
)
model.print_trainable_parameters()
model.to(device)
optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
schedule = get_linear_schedule_with_warmup(optimizer, 1, args.steps)
model.train()
total = 0
for step in range(args.steps):
    ids = torch.randint(96, (2, 24), device=device)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    total += loss.detach().float()
print(f"mean loss {total.item() / args.steps:.7f}")
