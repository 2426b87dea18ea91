"""Stands in for vLLM where only its process matters: what starts, what listens, what is left."""
