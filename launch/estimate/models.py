"""Parameters of models by name, with ImageNet's 1,000 classes or BERT's masked words."""

# Counts of torchvision's models, and of hvdtrain's BERT with 30,522 tokens; verified by a test.
MODELS: dict[str, int] = {
    "efficientnet_b0": 5_288_548,
    "efficientnet_b1": 7_794_184,
    "efficientnet_b2": 9_109_994,
    "efficientnet_b3": 12_233_232,
    "efficientnet_b4": 19_341_616,
    "efficientnet_b5": 30_389_784,
    "efficientnet_b6": 43_040_704,
    "efficientnet_b7": 66_347_960,
    "efficientnet_v2_s": 21_458_488,
    "efficientnet_v2_m": 54_139_356,
    "efficientnet_v2_l": 118_515_272,
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "vgg16": 138_357_544,
    "inception_v3": 27_161_264,
    "bert_base": 109_514_298,
    "bert_large": 335_174_458,
}
