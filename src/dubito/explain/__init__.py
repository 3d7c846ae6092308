"""Why softmax fails: causes, collapse of ensembles, geometry of the last layer."""
