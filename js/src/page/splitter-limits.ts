// What a splitter divides: its name, its direction, and the limits of its size.

export interface Split {
  name: string; // the key under which the size is stored
  label: string;
  upright: boolean; // it moves horizontally
  least: number;
  most: number;
  usual: number;
  /** 1: towards the end makes it larger. */
  sign: 1 | -1;
  set(size: number): void;
}

export const clamped = ({ least, most }: Split, size: number): number => Math.round(Math.min(Math.max(size, least), most));
