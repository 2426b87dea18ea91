"""A seller that is trained, and a buyer that any OpenAI-compatible server plays.

The buyer is part of the environment, as a user is in tau-bench: the policy never sees what the
buyer was told, and no token of the buyer is trained. Whether a deal counts is decided here by its
price, since a simulated user may say yes to what it must refuse.
"""

import os
import random
import re

from agentrl.env import EnvConfig, Environment, Task

BUYER = """You are buying a used lamp. You can pay at most ${budget}, and would like to pay less.
Do not say how much you have. Answer in one short sentence. If you take the price that was asked for
last, answer with the one word DEAL. If you give up, answer with the one word LEAVE."""
SELLER = """You sell a used lamp that cost you ${cost}. Get a good price for it, but never less
than it cost you. Name a price, such as $90, in each of your turns. The buyer says: Hello, how much
is the lamp?"""


class Bargain(Environment):
    class Config(EnvConfig):
        buyer_url: str = "http://127.0.0.1:8001/v1"
        """Of a server that speaks OpenAI's chat completions."""
        buyer_model: str = "buyer"
        """What the server calls its model."""
        buyer_key_variable: str = "BUYER_KEY"
        """Environment variable with the server's key; it may be unset."""
        max_offers: int = 6
        """Turns of the seller before the buyer leaves."""

    @classmethod
    async def load_shared(cls, config):
        from openai import AsyncOpenAI  # pip install openai

        key = os.environ.get(config.buyer_key_variable, "none")
        return AsyncOpenAI(base_url=config.buyer_url, api_key=key)

    @classmethod
    async def close_shared(cls, shared):
        await shared.close()

    def splits(self):
        return {"train": 1000, "test": 100}

    def get(self, split, index):
        draw = random.Random(f"{split}-{index}")
        cost = draw.randrange(20, 60)
        prompt = SELLER.replace("{cost}", str(cost))
        budget = cost + draw.randrange(20, 60)
        return Task(f"{split}-{index}", prompt, reference={"cost": cost, "budget": budget})

    async def on_text(self, text):
        prices = re.findall(r"\$(\d{1,6})\b", text)
        said = await self.ask_buyer()
        if "DEAL" in said and prices:
            self.finish(reward=self.profit(int(prices[-1])), info={"price": int(prices[-1])})
        elif "LEAVE" in said or self.episode.num_turns >= self.config.max_offers:
            self.finish(reward=0.0)
        else:
            return said

    async def ask_buyer(self):
        """What the buyer answers. Its dialogue is the seller's with the roles exchanged."""
        told = BUYER.replace("{budget}", str(self.task.reference["budget"]))
        messages = [{"role": "system", "content": told}]
        messages.append({"role": "assistant", "content": "Hello, how much is the lamp?"})
        for message in self.episode.messages[1:]:
            role = "user" if message["role"] == "assistant" else "assistant"
            messages.append({"role": role, "content": message["content"]})
        # A server that fails raises, and the episode has no reward: its seller did nothing wrong.
        reply = await self.shared.chat.completions.create(
            model=self.config.buyer_model, messages=messages, max_tokens=60
        )
        return reply.choices[0].message.content or ""

    def profit(self, price):
        """The share of what there is to win; 0 for a deal that one of the two must not make."""
        cost, budget = self.task.reference["cost"], self.task.reference["budget"]
        fair = cost <= price <= budget
        self.metrics["unfair_deals"] = float(not fair)
        return (price - cost) / (budget - cost) if fair else 0.0
