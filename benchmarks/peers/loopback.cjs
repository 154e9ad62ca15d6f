// Loaded before a server that would listen on every address: it listens on this machine's only.
const net = require("node:net");

const listen = net.Server.prototype.listen;
net.Server.prototype.listen = function (port, ...rest) {
  const told = rest.filter((each) => typeof each === "function");
  return listen.call(this, { port: Number(port?.port ?? port), host: "127.0.0.1" }, ...told);
};
