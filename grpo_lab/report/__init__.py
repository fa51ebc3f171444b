"""What a run looks like: figures, a timeline and one offline page, all read from the trace."""
