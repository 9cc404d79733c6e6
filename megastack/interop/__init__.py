"""Import and export of models as Hugging Face folders."""
