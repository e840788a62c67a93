"""Integrations: callbacks for the Trainers of transformers and Lightning."""
