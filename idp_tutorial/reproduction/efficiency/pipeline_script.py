"""The classes of texts from `transformers.pipeline`, without this package."""

import csv
from argparse import ArgumentParser

import torch


def classify_with_pipeline() -> None:
    """Classify the texts of a CSV file, and write each text with its class."""
    parser = ArgumentParser()
    for name in ("model", "texts", "out", "device", "dtype"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--max_len", type=int)
    args = parser.parse_args()
    from transformers import pipeline

    device = 0 if args.device != "cpu" and torch.cuda.is_available() else -1
    classify = pipeline("text-classification", args.model, device=device, dtype=args.dtype)
    with open(args.texts, newline="", encoding="utf-8") as file:
        texts = [row["text"] for row in csv.DictReader(file)]
    predictions = classify(texts, truncation=True, max_length=args.max_len)
    with open(args.out, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "prediction"])
        for text, prediction in zip(texts, predictions):
            writer.writerow([text, prediction["label"]])


if __name__ == "__main__":
    classify_with_pipeline()
