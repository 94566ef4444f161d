"""Host lists, placement and launcher commands. Imports no framework and no Horovod."""
