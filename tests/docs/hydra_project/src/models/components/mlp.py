from torch import Tensor, nn


class MLP(nn.Module):
    """Two linear layers."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))

    def forward(self, points: Tensor) -> Tensor:
        return self.layers(points)
