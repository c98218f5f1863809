"""One step of the exchange: residuals, compression, state and traffic."""
