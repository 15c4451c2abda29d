"""Files as sources and sinks, one module a format; the engine joins them to anything else."""
