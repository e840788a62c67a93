"""Where people train already: callbacks for the Trainers of transformers and Lightning."""
