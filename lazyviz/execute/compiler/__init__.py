"""What backends share that compile whole segments, and the Inductor backend."""
