"""What the words of pages mean: a page shows it when a reader points at a word."""

MEANINGS = {
    "activations": "Memory of the values that backward passes need.",
    "backward": "Time of backward passes, without those parts that have a column of their own.",
    "bubble": "Share of the ranks' time in which they had nothing to do.",
    "communication": "Time in which messages between ranks were on their way.",
    "handover": "Time of a message to the next stage that no work hides.",
    "layout": "The part of a weight that each device of the mesh holds.",
    "load imbalance": "Idle time because stages are not equally slow.",
    "memory": "Peak memory of the device that needs most.",
    "mesh": "The devices that compute a stage together.",
    "MFU": "Model FLOPs utilisation: FLOP/s of the model without recomputes, as a share of the "
    "devices' peak.",
    "micro-batches": "The parts of a mini-batch that pass through the stages one after the other.",
    "recompute": "Second forward passes, for values that were not kept.",
    "recomputed": "The layers that run forward a second time, for values that were not kept.",
    "reduction": "Sums of gradients over replicas.",
    "replicas": "Copies of the model, each with its part of a mini-batch.",
    "schedule": "The order of forward and backward passes on each rank.",
    "set-up": "The rest of a step, outside of its timeline.",
    "share of ideal": "Utilisation as a share of that without messages and late starts.",
    "stage": "Layers that follow each other and run on the same devices.",
    "stages": "A stage is layers that follow each other and run on the same devices.",
    "to the next": "Bytes of a micro-batch to the next stage.",
    "weight backward": "The parts of backward passes that compute gradients of weights.",
    "weights etc.": "Memory of weights, gradients and optimizer state.",
}
