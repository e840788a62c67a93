import { describe, expect, it } from "vitest";
import { charWidth, shorten } from "../src/page/dom";

const room = (columns: number): number => columns * charWidth(10) + 0.1;

describe("shortening", () => {
  it("counts East Asian letters and emoji as two", () => {
    expect(shorten("あいうえおかきくけこ", room(10), 10)).toBe("あ…くけこ");
    expect(shorten("あいうえお", room(10), 10)).toBe("あいうえお");
    expect(shorten("abcdefghij", room(10), 10)).toBe("abcdefghij");
    expect(shorten("한국어 모듈 이름", room(11), 10)).toBe("한국… 이름");
  });

  it("cuts no letter in two", () => {
    const family = "👩‍👩‍👧";
    expect(shorten(family.repeat(10), room(9), 10)).toBe(`${family}…${family.repeat(2)}`);
    expect(shorten("e\u0301".repeat(20), room(9), 10)).toBe(`${"e\u0301".repeat(3)}…${"e\u0301".repeat(5)}`);
    expect(shorten("🇩🇪".repeat(10), room(9), 10)).toBe("🇩🇪…🇩🇪🇩🇪");
  });

  it("keeps right-to-left words whole where there is room", () => {
    expect(shorten("طبقة.الانتباه", room(20), 10)).toBe("طبقة.الانتباه");
  });
});
