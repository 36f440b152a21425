"""The ``finetune`` recipe: a pretrained causal language model on text, conversations or preferences."""
