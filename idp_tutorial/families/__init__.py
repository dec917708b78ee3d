"""One module a family of Hugging Face models: how to embed, mask and run a layer."""
