"""Judge math answers by text rules and by algebra."""
