"""Zero-shot evaluation: items from files, from the Hugging Face hub, or made of held-out text, scored by lm-eval."""
