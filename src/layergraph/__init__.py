"""Compiler-style graph rewriting for Hugging Face and peft models, on ``torch.export``."""
