"""What people look at: pages and figures."""
