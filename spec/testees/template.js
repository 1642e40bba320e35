// A testee to start from (spec/testee-protocol.md): boundary-bundle conformance -- node template.js
// Fill in the functions with your codec; what it cannot do stays skipped.
"use strict";
const readline = require("node:readline");

const HELLO = {
  protocol: 1,
  name: "template",
  language: "JavaScript",
  version: "0",
  classes: ["one", "core", "stream"], // those that your codec has
  dtypes: ["f32", "i32"],
};

// Decode data, given in pieces of these sizes (undefined: whole), with request.class. Return
// {bundles: [...]}, and error: {name, number, offset} if there was one. Integers of 64 bits
// are strings: use BigInt, a Number holds 53.
function decode(request, data, pieces) {
  return { skipped: "no decoder yet" };
}

// Return {data: hexadecimal digits}, or {error: ...}.
function encode(request, bundle) {
  return { skipped: "no encoder yet" };
}

function answer(request) {
  switch (request.cmd) {
    case "hello":
      return HELLO;
    case "stop":
      return {};
    case "decode":
    case "stream":
      return decode(request, Buffer.from(request.data, "hex"), request.pieces);
    case "encode":
      return encode(request, request.bundle);
    default:
      return { skipped: `unknown command ${request.cmd}` };
  }
}

readline.createInterface({ input: process.stdin }).on("line", (line) => {
  const request = JSON.parse(line);
  let told;
  try {
    told = answer(request);
  } catch (error) { // a fault of this program, not of the input
    told = { failed: String(error) };
  }
  const text = JSON.stringify({ seq: request.seq, ...told }) + "\n";
  // After stop the program ends, but not before its last line has left.
  process.stdout.write(text, () => request.cmd === "stop" && process.exit(0));
});
