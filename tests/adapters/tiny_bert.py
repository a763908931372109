"""A BERT of width 32 that learns from which half of the vocabulary the first word comes."""

import torch


def bert(*, layers, dropout=0.0):
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=64,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForSequenceClassification(config)


def with_lora():
    """Return a model with dropout in which only the adapters and the head are trained."""
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(task_type="SEQ_CLS", r=4, lora_alpha=16, target_modules=["query", "value"])
    return get_peft_model(bert(layers=1, dropout=0.1), settings)


def texts(count):
    words = torch.randint(2, 64, (count, 8), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": line, "labels": (line[0] > 32).long()} for line in words]
