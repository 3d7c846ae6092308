"""What people do with scores: evaluate them, and show them on real photographs."""
