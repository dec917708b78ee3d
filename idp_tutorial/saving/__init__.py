"""Save and load trained prompts, alone, on the Hugging Face hub, or as a peft adapter."""
