"""Models of other projects: Hugging Face folders in and out."""

from spannorm_jax.interop.huggingface import load_hf, save_hf

__all__ = ['load_hf', 'save_hf']
