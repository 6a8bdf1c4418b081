"""Parameters and gradient tensors of models by name, with ImageNet's 1,000 classes or BERT's masked words."""

# Counts of torchvision's models, and of hvdtrain's BERT with 30,522 tokens; verified by a test.
MODELS: dict[str, tuple[int, int]] = {
    "efficientnet_b0": (5_288_548, 213),
    "efficientnet_b1": (7_794_184, 301),
    "efficientnet_b2": (9_109_994, 301),
    "efficientnet_b3": (12_233_232, 340),
    "efficientnet_b4": (19_341_616, 418),
    "efficientnet_b5": (30_389_784, 506),
    "efficientnet_b6": (43_040_704, 584),
    "efficientnet_b7": (66_347_960, 711),
    "efficientnet_v2_s": (21_458_488, 452),
    "efficientnet_v2_m": (54_139_356, 649),
    "efficientnet_v2_l": (118_515_272, 897),
    "resnet18": (11_689_512, 62),
    "resnet34": (21_797_672, 110),
    "resnet50": (25_557_032, 161),
    "resnet101": (44_549_160, 314),
    "resnet152": (60_192_808, 467),
    "vgg16": (138_357_544, 32),
    "inception_v3": (27_161_264, 292),
    "bert_base": (109_514_298, 202),
    "bert_large": (335_174_458, 394),
}
