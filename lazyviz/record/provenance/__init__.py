"""Where an op comes from: source line, notebook cell, module, phase, variable names."""
