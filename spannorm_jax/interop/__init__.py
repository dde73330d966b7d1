"""Models of other projects: Hugging Face folders in and out."""
