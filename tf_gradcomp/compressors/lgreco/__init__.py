"""L-GreCo: a method whose settings of each layer are planned between two steps of training."""
