"""transformers models with padding, causal and relative masks give no false alarm in forward, backward and
step.
"""

import pytest
import torch

from amp_plugin import GradScaler, autocast, diagnose

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = {
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "hidden_size": 16,
    "vocab_size": 64,
}
T5 = {
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 16,
    "num_layers": 1,
    "num_heads": 2,
    "vocab_size": 64,
    "decoder_start_token_id": 0,
}
MODELS = {
    "Bert": ("BertForSequenceClassification", SIZES),
    "Llama": ("LlamaForCausalLM", SIZES),
    "T5": ("T5ForConditionalGeneration", T5),
}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_no_alarm(name, attention):
    torch.manual_seed(0)
    kind, sizes = MODELS[name]
    options = {} if name == "T5" else {"attn_implementation": attention}
    model = getattr(transformers, kind)(getattr(transformers, f"{name}Config")(**sizes, **options)).train()
    tokens = torch.randint(2, 64, (2, 9))
    mask = torch.ones_like(tokens)
    mask[0, 6:], mask[1, :3] = 0, 0
    labels = torch.tensor([0, 1]) if name == "Bert" else tokens
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = GradScaler("cpu", init_scale=128.0)
    with diagnose(model) as diagnosis:
        with autocast("cpu", dtype=torch.float16):
            loss = model(input_ids=tokens, attention_mask=mask, labels=labels).loss
        scaler.scale(loss).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert diagnosis.findings == []
    assert not scaler.last_step(optimizer).skipped


def test_a_fault_in_a_layer_is_named_by_its_path():
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, attn_implementation="eager"))
    model.model.layers[0].self_attn.q_proj.weight.data.mul_(1e5)
    model.model.layers[0].self_attn.k_proj.weight.data.mul_(1e5)
    with diagnose(model, keep_going=True) as diagnosis, autocast("cpu", dtype=torch.float16):
        model(input_ids=torch.randint(2, 64, (2, 9)))
    assert diagnosis.findings[0].module.startswith("model.layers.0.self_attn")
    assert "transformers" in diagnosis.findings[0].place.file
    assert diagnosis.findings[0].caller.file.endswith("test_models.py")
