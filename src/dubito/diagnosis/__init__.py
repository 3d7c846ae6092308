"""Why softmax fails: causes, boundary structure, regions, filtering, and an audit of a set-up."""
