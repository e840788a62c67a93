import { describe, expect, it } from "vitest";
import { charWidth, cut } from "../src/page/dom";

const room = (columns: number): number => columns * charWidth(10) + 0.1;

describe("cutting", () => {
  it("counts East Asian letters and emoji as two", () => {
    expect(cut("あいうえおかきくけこ", room(10), 10)).toBe("あいうえ…");
    expect(cut("あいうえお", room(10), 10)).toBe("あいうえお");
    expect(cut("abcdefghij", room(10), 10)).toBe("abcdefghij");
    expect(cut("한국어 모듈 이름", room(11), 10)).toBe("한국어 모…");
  });

  it("does not split graphemes", () => {
    const family = "👩‍👩‍👧";
    expect(cut(family.repeat(10), room(9), 10)).toBe(`${family.repeat(4)}…`);
    expect(cut("e\u0301".repeat(20), room(9), 10)).toBe(`${"e\u0301".repeat(8)}…`);
    expect(cut("🇩🇪".repeat(10), room(9), 10)).toBe("🇩🇪🇩🇪🇩🇪🇩🇪…");
  });

  it("keeps right-to-left text whole if it fits", () => {
    expect(cut("طبقة.الانتباه", room(20), 10)).toBe("طبقة.الانتباه");
  });
});
