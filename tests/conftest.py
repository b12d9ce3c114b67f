"""What all tests share."""

import torch

# The models are tiny and the tests run side by side: threads that wait for each other take most of the time.
torch.set_num_threads(1)
