"""Advice: strategies of training compared on cards, by recording each."""
