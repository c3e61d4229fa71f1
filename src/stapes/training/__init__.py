"""From a prepared corpus to a recogniser: recipes, objectives, the trainer, its checkpoints and its log."""
